//! Where results go.

use std::fs::File;
use std::io;
use std::path::Path;

use serde::Serialize;

/// Creates the file of an option `--json`. Before a measurement: a path that cannot be written to is better known then than after it.
///
/// # Errors
/// The file cannot be created, or is `-`: what people read goes to standard output.
pub fn create_json(path: Option<&Path>) -> Result<Option<File>, String> {
    let create = |path: &Path| match path.to_str() {
        Some("-") => Err("standard output has the table; name a file, or /dev/stdout for both".to_owned()),
        _ => File::create(path).map_err(|error| error.to_string()),
    };
    path.map(|path| create(path).map_err(|why| format!("--json {}: {why}", path.display()))).transpose()
}

/// Writes results to the file of an option `--json`, if there is one.
///
/// # Errors
/// The file cannot be written.
pub fn write_json(file: Option<File>, results: &impl Serialize) -> io::Result<()> {
    file.map_or(Ok(()), |file| Ok(serde_json::to_writer_pretty(file, results)?))
}
