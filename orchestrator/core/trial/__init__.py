"""What one attempt is asked, what it reports, and what its failure means."""
