"""What the benchmark needs beside its own file: other packages' losses, each in every form that it has, and an exact one."""
