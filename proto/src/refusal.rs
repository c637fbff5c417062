//! Requests that are turned down because of what stands in their fields.
//!
//! The sentence is for people; programs find the fields in a `google.rpc.BadRequest`, as
//! <https://google.aip.dev/193> has it.

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// A field and what is wrong with it.
pub type BadField = (String, String);

/// INVALID_ARGUMENT: these fields make no sense, whatever the state of the job is.
#[must_use]
pub fn invalid(message: impl Into<String>, fields: impl IntoIterator<Item = BadField>) -> Status {
    refuse(Code::InvalidArgument, message.into(), fields)
}

/// OUT_OF_RANGE: this field is beyond what the job has, yet.
#[must_use]
pub fn out_of_range(field: &str, problem: &str) -> Status {
    let fields = [(field.to_owned(), problem.to_owned())];
    refuse(Code::OutOfRange, format!("{field} {problem}"), fields)
}

fn refuse(code: Code, message: String, fields: impl IntoIterator<Item = BadField>) -> Status {
    let mut details = ErrorDetails::new();
    for (field, problem) in fields {
        details.add_bad_request_violation(field, problem);
    }
    Status::with_error_details(code, message, details)
}
