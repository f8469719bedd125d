"""What every benchmark uses: processes, environments, load generators, tables, pages."""
