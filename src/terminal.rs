//! Command lines, and output that may fail: `println!` and `eprintln!` panic where a disk is full or a reader is gone.

use std::fmt::Arguments;
use std::io::{self, Write};

use clap::{Command, Parser, ValueEnum};

/// `println!` that returns the error, as [`terminal::line`](crate::terminal::line) does.
#[macro_export]
macro_rules! out {
    ($($line:tt)*) => { $crate::terminal::line(::std::io::stdout(), format_args!($($line)*)) };
}

/// `eprintln!` that ignores errors.
#[macro_export]
macro_rules! note {
    ($($line:tt)*) => { $crate::terminal::note(format_args!($($line)*)) };
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

/// Parses the command line; ends the process on help and mistakes. Lists take commas or spaces between their values.
pub fn parse<T: Parser>() -> T {
    let matches = lists(T::command()).get_matches();
    T::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

/// The name of an option's value on the command line.
pub fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

fn lists(command: Command) -> Command {
    let command = command.mut_args(|arg| {
        let is_list = arg.get_value_delimiter().is_some() && arg.get_num_args().is_none();
        if is_list { arg.num_args(1..) } else { arg }
    });
    command.mut_subcommands(lists)
}
