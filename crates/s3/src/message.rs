//! Messages of a bucket's errors.

use std::error::Error;

/// Part of every URL from which a machine fetches the credentials of its role.
pub const ROLE: &str = "/latest/";

/// An error in one short line: the innermost one, because every layer above repeats it, and from S3's XML only code and
/// message. It contains no password.
#[must_use]
pub fn brief(error: &object_store::Error) -> String {
    let text = innermost(error).to_string();
    let message = match (tag(&text, "Code"), tag(&text, "Message")) {
        (Some(code), Some(message)) => format!("the store responded with {code}: {message}"),
        (Some(code), None) => format!("the store responded with {code}"),
        _ if error.to_string().contains(ROLE) => {
            format!("no credentials are set, and the machine's role could not be read ({text})")
        }
        _ => text.trim_end_matches([':', ' ']).to_owned(),
    };
    hide_password(&message.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Why a bucket refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketRefusal {
    /// The credentials are wrong or not allowed to do this.
    Access,
    /// The credentials have expired; those of a role are renewed.
    Expired,
    /// The bucket or the object does not exist.
    Missing,
    /// The clock of this machine is wrong.
    Clock,
}

/// What to do about [`BucketRefusal::Clock`].
pub const CLOCK_REMEDY: &str = "set the clock of this machine, as with `sudo systemctl restart systemd-timesyncd`: \
                                requests are signed with the time";

/// Why the bucket refused; `None` for any other error. For lists and for some codes `object_store` has only the text of the
/// response.
#[must_use]
pub fn refusal(error: &object_store::Error) -> Option<BucketRefusal> {
    use object_store::Error::{NotFound, PermissionDenied, Unauthenticated};
    // https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
    const ACCESS: [&str; 6] = [
        "AccessDenied",
        "AccountProblem",
        "AllAccessDisabled",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
    ];
    let text = innermost(error).to_string();
    let code = tag(&text, "Code");
    if code == Some("RequestTimeTooSkewed") {
        return Some(BucketRefusal::Clock);
    }
    match error {
        PermissionDenied { .. } | Unauthenticated { .. } => return Some(BucketRefusal::Access),
        NotFound { .. } => return Some(BucketRefusal::Missing),
        _ => {}
    }
    match code? {
        "NoSuchBucket" => Some(BucketRefusal::Missing),
        "ExpiredToken" => Some(BucketRefusal::Expired),
        code => ACCESS.contains(&code).then_some(BucketRefusal::Access),
    }
}

/// The cause below all layers.
fn innermost(error: &object_store::Error) -> &dyn Error {
    let mut innermost: &dyn Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost
}

/// The content of an element of S3's XML.
fn tag<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>")).map(|(text, _)| text)
}

/// The text with `…` for the user and the password of every URL in it, as in `http://…@host`.
#[must_use]
pub fn hide_password(text: &str) -> String {
    const SCHEME: &str = "://";
    let mut parts = text.split(SCHEME);
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| c.is_whitespace() || "/?#\"'`".contains(c));
        let (authority, rest) = part.split_at(end.unwrap_or(part.len()));
        shown.push_str(SCHEME);
        match authority.rsplit_once('@') {
            Some((_password, host)) => shown.extend(["…@", host]),
            None => shown.push_str(authority),
        }
        shown.push_str(rest);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: text.into() }
    }

    #[test]
    fn an_xml_response_becomes_its_code_and_message() {
        let xml = "Server returned non-2xx status code: 404 Not Found: <?xml version=\"1.0\"?>\n<Error>\
                   <Code>NoSuchBucket</Code>\n<Message>There is\nno such bucket.</Message></Error>";
        assert_eq!(
            brief(&generic(xml)),
            "the store responded with NoSuchBucket: There is no such bucket."
        );
        assert_eq!(
            brief(&generic("<Error><Code>SlowDown</Code></Error>")),
            "the store responded with SlowDown"
        );
        assert_eq!(brief(&generic("status code: 503: ")), "status code: 503");
    }

    #[test]
    fn a_refusal_is_known_by_its_code_where_only_the_text_has_it() {
        let coded = |code: &str| refusal(&generic(&format!("<Error><Code>{code}</Code></Error>")));
        assert_eq!(coded("AccessDenied"), Some(BucketRefusal::Access));
        assert_eq!(coded("ExpiredToken"), Some(BucketRefusal::Expired));
        assert_eq!(coded("NoSuchBucket"), Some(BucketRefusal::Missing));
        assert_eq!(coded("SlowDown"), None);
        let denied = object_store::Error::PermissionDenied {
            path: "a".to_owned(),
            source: "<Error><Code>RequestTimeTooSkewed</Code></Error>".into(),
        };
        assert_eq!(refusal(&denied), Some(BucketRefusal::Clock));
        assert_eq!(refusal(&generic("connection refused")), None);
    }

    #[test]
    fn no_message_contains_a_password() {
        for (text, shown) in [
            ("GET http://user:p@ss@host:9000/a@b in 1s", "GET http://…@host:9000/a@b in 1s"),
            ("(https://token@host) and s3://bucket/a", "(https://…@host) and s3://bucket/a"),
            ("no URL: a@b", "no URL: a@b"),
            ("ends with http://u:p@", "ends with http://…@"),
        ] {
            assert_eq!(hide_password(text), shown);
            assert_eq!(brief(&generic(text)), shown);
        }
    }
}
