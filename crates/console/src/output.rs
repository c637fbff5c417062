//! The only module that prints. Everything except [`painted`] and [`page`] is cleaned here, because names, paths and
//! messages may come from files of others.

use std::{
    fmt::Display,
    fs,
    io::{self, ErrorKind, IsTerminal, Write},
    path::Path,
    process,
};

use baton_job::exit::{self, Failure, Outcome};

use crate::{
    clean::{clean, lines},
    failure::failed,
};

/// Prints a line of a command's result. Exits successfully if the reader has closed the pipe (`baton watch | head`), and
/// with an error if the result cannot be written, for instance to a full disk.
pub fn line(text: impl Display) {
    painted(lines(&text.to_string()));
}

/// As [`line()`], without the end of the line, and shown at once.
pub fn part(text: impl Display) {
    let mut out = io::stdout();
    written(write!(out, "{}", lines(&text.to_string())).and_then(|()| out.flush()));
}

/// As [`line()`], for a text with colours, whose parts must be clean already.
pub fn painted(text: impl Display) {
    written(writeln!(io::stdout(), "{text}"));
}

fn written(result: io::Result<()>) {
    match result {
        Ok(()) => {}
        Err(problem) if problem.kind() == ErrorKind::BrokenPipe => {
            process::exit(i32::from(exit::OK))
        }
        Err(problem) => {
            let failure = failed(format!("the output cannot be written: {problem}"));
            error(&failure);
            process::exit(i32::from(Outcome::Failed { failure }.exit_code()));
        }
    }
}

/// Prints a line of a running job, best effort: the job continues even if the reader has closed the pipe.
pub fn job_line(text: impl Display) {
    let _ = writeln!(io::stdout(), "{}", lines(&text.to_string()));
}

/// Clears the terminal and prints `text`, whose parts must be clean already, at its top.
pub fn page(text: impl Display) {
    painted(format_args!("\x1b[H\x1b[J{text}"));
}

/// Prints a line about a command's progress to standard error, separate from its result.
pub fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "{}", lines(&text.to_string()));
}

/// Refuses to replace something that is no regular file, for instance a device.
///
/// # Errors
/// `target` exists and is no file.
pub fn refuse_special_file(target: &Path) -> Result<(), Failure> {
    match fs::metadata(target) {
        Ok(existing) if !existing.is_file() => Err(exit::bad_input(format!(
            "{} exists and is not a regular file: give another path",
            target.display()
        ))),
        _ => Ok(()),
    }
}

/// Prints why a command failed.
pub fn error(failure: &Failure) {
    let _ = writeln!(io::stderr(), "error: {}", clean(&failure.message));
}

/// Asks the user to confirm; `None` if standard input or standard error is not a terminal.
pub fn confirm(question: impl Display) -> Option<bool> {
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return None;
    }
    let _ = write!(io::stderr(), "{} [y/N] ", lines(&question.to_string()));
    let _ = io::stderr().flush();
    let mut answer = String::new();
    let _ = io::stdin().read_line(&mut answer);
    Some(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Whether standard output is a terminal with cursor control.
pub fn is_terminal() -> bool {
    io::stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Width of the terminal in columns, if standard output is one.
pub fn width() -> Option<u16> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    Some(size.ws_col).filter(|columns| *columns > 0)
}

/// Whether to use colours, see <https://no-color.org>.
pub fn is_colourful() -> bool {
    is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}
