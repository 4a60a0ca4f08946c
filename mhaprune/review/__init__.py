"""Views of the tables: terminal, pictures and page. No statistic is computed here."""
