"""Models that answer when the test lets them."""
