"""Where rows come from: one file per dataset kind, and the cache of decoded arrays they share."""
