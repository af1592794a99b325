"""What our HTTP servers share: who may ask, replies and errors, a page's policy, the process."""
