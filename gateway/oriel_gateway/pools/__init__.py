"""Pools of upstream servers: permits, endpoints, their health, and which models they have."""
