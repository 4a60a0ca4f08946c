"""Programs: configuration, preparation, launching, recording and reproducing of runs."""
