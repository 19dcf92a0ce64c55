"""The live page: one HTML file that shows the fleet as it is, and the stream of events that feeds it."""
