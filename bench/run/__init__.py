"""Times the cases: plan, trials, gate."""
