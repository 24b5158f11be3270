"""What a rank does, seen from outside: flight recorder, dumps and what they tell, metrics, ranges for profilers."""
