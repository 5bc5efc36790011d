"""Lightning callbacks: pictures and speed, beside any module that explains."""
