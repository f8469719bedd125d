"""`oriel load`: an open-loop generator.

arrivals, histogram, tally, lag   pure: when requests come, what is counted, whether it may be quoted
scenario, bodies                  what is asked for, as values and as bytes
pacer, senders, generator         the loops: wake on time, send, gather
report, plot, command             what is said at the end, and the command itself
"""
