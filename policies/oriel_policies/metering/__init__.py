"""The arithmetic of metering: device time, its shares, usage rows, prices. No I/O, integers only."""
