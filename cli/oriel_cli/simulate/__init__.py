"""`oriel simulate scale`: compares scaling policies in virtual time, on the same load."""
