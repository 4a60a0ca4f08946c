"""Statistics of effects, without torch: intervals, verdicts, control variates, agreement."""
