//! The program `fracbit`.

use std::process::ExitCode;

fn main() -> ExitCode {
    fracbit_cli::main(std::env::args_os()).into()
}
