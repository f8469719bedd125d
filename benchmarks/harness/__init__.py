"""Parts that every benchmark uses: processes, environments, load generators, tables, pages."""
