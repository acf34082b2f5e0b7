"""The paper's recall experiments: tasks, cells, sweeps, tables. Importing this package imports no torch."""
