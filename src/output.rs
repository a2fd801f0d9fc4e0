//! Output that may fail: `println!` and `eprintln!` panic where a disk is full or a reader is gone.

use std::fmt::Arguments;
use std::io::{self, Write};

/// `println!` that returns the error, as [`output::line`](crate::output::line) does.
#[macro_export]
macro_rules! out {
    ($($line:tt)*) => { $crate::output::line(::std::io::stdout(), format_args!($($line)*)) };
}

/// `eprintln!` that ignores errors.
#[macro_export]
macro_rules! note {
    ($($line:tt)*) => { $crate::output::note(format_args!($($line)*)) };
}

/// Writes a line. A reader that has seen enough (`| head`) is no failure.
pub fn line(mut to: impl Write, line: Arguments<'_>) -> io::Result<()> {
    match writeln!(to, "{line}") {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(io::Error::new(error.kind(), format!("cannot write the output: {error}")))
        }
        _ => Ok(()),
    }
}

/// What [`note!`](crate::note) does.
pub fn note(text: Arguments<'_>) {
    // There is no other place to tell of it.
    let _ = writeln!(io::stderr(), "{text}");
}
