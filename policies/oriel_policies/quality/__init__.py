"""Rules of prediction quality: how far samples have moved from their reference, what a reference says, and when a
canary is rolled back. No I/O, clocks or numpy.
"""
