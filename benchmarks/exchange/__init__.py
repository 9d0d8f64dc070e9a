"""The speed and memory of the exchange, beside what no exchange can beat and what others do."""
