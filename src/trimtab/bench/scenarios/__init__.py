"""One scenario per figure: what `trimtab bench NAME` runs."""
