"""Compiled artefacts in a running server: the folder that keeps them, the processes that build and check them, and the
loop that brings one into service while the reference serves, or takes it out again. The rules are in
`oriel_policies.artefacts`.
"""
