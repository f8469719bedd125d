"""`oriel tune`: finds the settings with which one model reaches an objective, and says what each of them is worth."""
