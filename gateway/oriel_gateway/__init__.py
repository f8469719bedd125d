"""The gateway keeps the promises: identify -> limit -> admit -> route -> forward, head before body."""
