"""What reads: records.jsonl, and the table, plots and page of it; it imports nothing that runs."""
