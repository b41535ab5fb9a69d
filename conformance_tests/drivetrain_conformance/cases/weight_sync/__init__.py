"""Weight sync: every way to send, refusals, failed updates, versions, and what requests in flight see."""
