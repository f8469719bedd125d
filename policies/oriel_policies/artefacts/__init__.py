"""Rules of compiled artefacts: what identifies one, its states, whether its outputs agree with those of the model it
was compiled from, which refusals are remembered, and when one is removed. No I/O, clocks or runtimes.
"""
