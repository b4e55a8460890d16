"""What brings demoted pages back: digests that a page leaves in HBM, from which attention estimates what it misses."""
