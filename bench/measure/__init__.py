"""What runs: processes, cases that take turns, gates, rounds; all of it ends in records.jsonl."""
