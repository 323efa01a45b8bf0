"""Networks of real peers as operators use them: make, join, change, check, watch, rehearse and attack one."""
