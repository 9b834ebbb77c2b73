"""The analysis: from a trace to a diagnosis. Needs no torch, and knows neither the hooks nor the reports."""
