"""`oriel simulate scale`: policies of scaling in virtual time, on the same load."""
