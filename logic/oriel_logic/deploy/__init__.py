"""Deployment of services: loading a new version in a scratch process, its self-test, hot update and removal."""
