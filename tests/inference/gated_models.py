"""Models that answer when the test says so."""
