"""`tightfit-agent bench`: an open-loop load generator for servers of the Open Inference Protocol."""
