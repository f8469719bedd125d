"""Turns single calls into batches and back: queue, assembly, cores, execution."""
