"""From single calls to batches and back: queue, assembly, cores, execution."""
