//! Error responses that name the invalid fields of a request.
//!
//! The message is for people; programs find the fields in a `google.rpc.BadRequest`, as specified in
//! <https://google.aip.dev/193>.

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// A field and its problem.
pub type BadField = (String, String);

/// INVALID_ARGUMENT: these fields are invalid in every state of the job.
#[must_use]
pub fn invalid(message: impl Into<String>, fields: impl IntoIterator<Item = BadField>) -> Status {
    refuse(Code::InvalidArgument, message.into(), fields)
}

/// OUT_OF_RANGE: this field is beyond the current range, which may grow.
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
