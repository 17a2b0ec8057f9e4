"""`trimtab report`: one self-contained HTML page of a run, two runs, a plan, a simulation or a bench."""
