//! What ends this process.

use baton_job::exit::{Class, Failure};

/// The recipe, a flag or a path is wrong; another try would end the same way.
pub(crate) fn bad_input(message: String) -> Failure {
    Failure { class: Class::BadInput, message }
}

/// Another try may help.
pub(crate) fn crash(message: String) -> Failure {
    Failure { class: Class::Crash, message }
}
