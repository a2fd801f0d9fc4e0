//! Parsing of command lines.

use clap::{Command, Parser};

/// Parses the command line; ends the process on help and mistakes. Lists take commas or spaces between their values.
pub fn parse<T: Parser>() -> T {
    let matches = lists(T::command()).get_matches();
    T::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

fn lists(command: Command) -> Command {
    let command = command.mut_args(|arg| {
        let is_list = arg.get_value_delimiter().is_some() && arg.get_num_args().is_none();
        if is_list { arg.num_args(1..) } else { arg }
    });
    command.mut_subcommands(lists)
}
