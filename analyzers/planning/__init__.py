"""Before the job: which layouts fit, how fast each would be, what a command has wrong, and the formulas behind it."""
