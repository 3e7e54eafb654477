"""Running on Ray: its own or a joined cluster, the tasks of trials, and the processes of a trial."""
