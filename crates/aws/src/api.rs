//! Calls the AWS CLI and explains its errors.
//!
//! The CLI's errors begin with a code in brackets and name the operation:
//! `An error occurred (AccessDenied) when calling the CreateStack operation: …`
//! (<https://docs.aws.amazon.com/cli/latest/userguide/cli-usage-returncodes.html>). It retries after
//! throttling and lost connections.

use std::{
    io,
    process::{Command, Stdio},
};

use baton_console::failure::{bad_input, failed};
use baton_job::exit::Failure;
use serde_json::Value;

/// Access to AWS, or a test's replacement for it.
pub(super) trait Api {
    /// Runs `aws` with these arguments and returns what it prints.
    fn call(&self, arguments: &[&str]) -> Result<Vec<u8>, Error>;

    /// As [`Api::call`], for a command that prints JSON. Empty output becomes `null`.
    fn json(&self, arguments: &[&str]) -> Result<Value, Error> {
        let text = self.call(arguments)?;
        if text.iter().all(u8::is_ascii_whitespace) {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&text).map_err(|error| Error {
            operation: arguments.iter().take(2).copied().collect::<Vec<_>>().join(" "),
            code: String::new(),
            message: format!("the answer is not JSON: {error}"),
        })
    }

    /// As [`Api::json`]; `None` if AWS reports that the requested object does not exist.
    fn find(&self, arguments: &[&str]) -> Result<Option<Value>, Error> {
        match self.json(arguments) {
            Err(error) if error.is_not_found() => Ok(None),
            answer => answer.map(Some),
        }
    }
}

/// The `aws` program on the `PATH`.
#[derive(Clone, Debug)]
pub(super) struct AwsCli {
    global: Vec<String>,
}

impl AwsCli {
    pub(super) fn new(region: Option<&str>, profile: Option<&str>) -> Self {
        let flags = [("--region", region), ("--profile", profile)];
        let given = flags.into_iter().filter_map(|(flag, value)| Some((flag, value?)));
        let global = given.flat_map(|(flag, value)| [flag.to_owned(), value.to_owned()]);
        Self { global: global.collect() }
    }

    /// The command line, not yet run.
    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("aws");
        // A pager would wait for a key. Since 2026, the CLI has other error formats too.
        command
            .env("AWS_PAGER", "")
            .env("AWS_CLI_ERROR_FORMAT", "legacy")
            .args(["--output", "json"])
            .args(&self.global)
            .args(arguments);
        command
    }
}

impl Api for AwsCli {
    fn call(&self, arguments: &[&str]) -> Result<Vec<u8>, Error> {
        let mut command = self.command(arguments);
        let output = command.stdin(Stdio::null()).output();
        let output = output.map_err(|error| Error::not_started(&error))?;
        match output.status.success() {
            true => Ok(output.stdout),
            false => Err(Error::parse(&String::from_utf8_lossy(&output.stderr), arguments)),
        }
    }
}

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Error {
    /// The operation that was called.
    operation: String,
    /// AWS's error code; empty if AWS was not reached.
    code: String,
    /// The error message of AWS.
    message: String,
}

impl Error {
    pub(super) fn not_started(error: &io::Error) -> Self {
        let message = match error.kind() {
            io::ErrorKind::NotFound => "there is no `aws` on the PATH".to_owned(),
            _ => format!("`aws` cannot be run: {error}"),
        };
        Self { operation: String::new(), code: "NoProgram".to_owned(), message }
    }

    pub(super) fn parse(stderr: &str, arguments: &[&str]) -> Self {
        let mut lines = stderr.lines().map(str::trim).filter(|line| !line.is_empty());
        // Details may follow the line with the error.
        let error_line = lines.clone().rfind(|line| line.contains("An error occurred ("));
        let text =
            error_line.or_else(|| lines.next_back()).unwrap_or("it failed without a message");
        let text = text.trim_start_matches("aws: [ERROR]: ");
        let operation = arguments.iter().take(2).copied().collect::<Vec<_>>().join(" ");
        // `aws s3` prints its own text before the error.
        let parts = text.split_once("An error occurred (").and_then(|(_, rest)| {
            let (code, rest) = rest.split_once(") when calling the ")?;
            let (operation, rest) = rest.split_once(" operation")?;
            // After retries, "(reached max retries: N)" comes before the message.
            let message = rest.split_once("): ").filter(|_| rest.starts_with(" ("));
            let message = message.map_or(rest, |(_, message)| message);
            Some((code, operation, message.trim_start_matches(':').trim()))
        });
        match parts {
            Some((code, operation, message)) => Self {
                operation: operation.to_owned(),
                code: code.to_owned(),
                message: message.to_owned(),
            },
            None => Self { operation, code: String::new(), message: text.trim().to_owned() },
        }
    }

    /// The error message of AWS.
    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// Whether the requested object does not exist.
    pub(super) fn is_not_found(&self) -> bool {
        const CODES: [&str; 6] = [
            "404",
            "NoSuchKey",
            "NoSuchBucket",
            "NotFound",
            "ParameterNotFound",
            "InvalidVolume.NotFound",
        ];
        CODES.contains(&self.code.as_str())
            || (self.code == "ValidationError" && self.message.contains("does not exist"))
    }

    /// What the user can do about the error.
    fn remedy(&self) -> Option<&'static str> {
        let has = |word: &str| self.message.contains(word);
        Some(match self.code.as_str() {
            "NoProgram" => {
                "install the AWS CLI (https://aws.amazon.com/cli/), version 2, or `pip install awscli`"
            }
            "AccessDenied"
            | "AccessDeniedException"
            | "UnauthorizedOperation"
            | "Client.UnauthorizedOperation" => {
                "your user or role must be allowed to do this; deploy/aws/README.md lists what `baton aws` calls"
            }
            "ExpiredToken" | "ExpiredTokenException" | "RequestExpired" => {
                "log in again (`aws sso login`, or new keys), and check this machine's clock"
            }
            "InvalidClientTokenId"
            | "UnrecognizedClientException"
            | "AuthFailure"
            | "SignatureDoesNotMatch" => {
                "AWS does not accept the keys: set them with `aws configure`, and check this machine's clock"
            }
            "OptInRequired" => "this account is not signed up for the region or the service",
            "VcpuLimitExceeded" | "MaxSpotInstanceCountExceeded" => QUOTA,
            "InsufficientCapabilitiesException" => "this is a bug in Baton: please report it",
            "LimitExceededException" | "LimitExceeded" => {
                "the account has reached its limit of these: remove some, or ask AWS for a higher limit"
            }
            "BucketAlreadyExists" => {
                "another account's bucket has this name: give another name with --bucket"
            }
            "TargetNotConnected" => {
                "the machine's SSM agent is not connected to AWS: it connects some minutes after the start, if the machine's \
                 image contains it and its subnet has a route to the internet"
            }
            _ if has("SessionManagerPlugin") => {
                "install the Session Manager plugin of the AWS CLI \
                 (https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html)"
            }
            _ if has("Unable to locate credentials") => {
                "set them with `aws configure` (or `aws sso login`)"
            }
            _ if has("SSO") || has("sso login") => "log in again: `aws sso login`",
            _ if has("You must specify a region") => {
                "give --region, or set a default with `aws configure`"
            }
            _ if has("could not be found") && has("profile") => {
                "list the existing ones with `aws configure list-profiles`"
            }
            _ if has("Could not connect to the endpoint") => {
                "check the network and the region's name"
            }
            _ => return None,
        })
    }
}

/// What the user can do about AWS's limits on machines.
pub(super) const QUOTA: &str = "the account's vCPU quota for this type is too small: ask for more under Service Quotas, EC2, \
     \"All P4, P3 and P2 Spot Instance Requests\" (p4d.24xlarge needs 96), or the matching quota for other types; that takes hours to days";

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let remedy = error.remedy();
        let Error { operation, code, message } = &error;
        let mut text = match (operation.is_empty(), code.is_empty()) {
            (true, _) => message.clone(),
            (false, true) => format!("aws {operation}: {message}"),
            (false, false) => format!("AWS refuses {operation} ({code}): {message}"),
        };
        if let Some(remedy) = remedy {
            text = format!("{}: {remedy}", text.trim_end_matches('.'));
        }
        // A retry without a change would fail in the same way.
        match remedy.is_some() {
            true => bad_input(text),
            false => failed(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_operation_code_and_remedy() {
        for (stderr, expected) in [
            (
                "\nAn error occurred (AccessDenied) when calling the CreateStack operation: User: arn:aws:iam::1:user/a is not authorized\n",
                "AWS refuses CreateStack (AccessDenied): User: arn:aws:iam::1:user/a is not authorized: your user or role",
            ),
            (
                "An error occurred (ThrottlingException) when calling the DescribeStacks operation (reached max retries: 4): Rate exceeded",
                "AWS refuses DescribeStacks (ThrottlingException): Rate exceeded",
            ),
            (
                "upload failed: ./x to s3://b/x An error occurred (NoSuchBucket) when calling the PutObject operation: The specified bucket does not exist",
                "AWS refuses PutObject (NoSuchBucket): The specified bucket does not exist",
            ),
            (
                "Unable to locate credentials. You can configure credentials by running \"aws login\".",
                "aws ec2 describe-x: Unable to locate credentials",
            ),
            (
                "\nCould not connect to the endpoint URL: \"https://ec2.moon.amazonaws.com/\"",
                "check the network",
            ),
            (
                "\naws: [ERROR]: An error occurred (ValidationError) when calling the DescribeStacks operation: Bad\n\n\
                 Additional error details:\nReason: x\n",
                "AWS refuses DescribeStacks (ValidationError): Bad",
            ),
            ("aws: [ERROR]: Unknown options: --x", "aws ec2 describe-x: Unknown options"),
            ("", "aws ec2 describe-x: it failed without a message"),
        ] {
            let failure = Failure::from(Error::parse(stderr, &["ec2", "describe-x", "--y"]));
            assert!(failure.message.contains(expected), "{failure}");
            assert!(!failure.message.contains('\n'), "{failure}");
        }
    }

    #[test]
    fn an_absent_object_is_distinguished_from_a_forbidden_one() {
        let absent = "An error occurred (ValidationError) when calling the DescribeStacks operation: Stack with id baton-x does not exist";
        assert!(Error::parse(absent, &[]).is_not_found());
        let head = "An error occurred (404) when calling the HeadBucket operation: Not Found";
        assert!(Error::parse(head, &[]).is_not_found());
        let forbidden = "An error occurred (403) when calling the HeadBucket operation: Forbidden";
        assert!(!Error::parse(forbidden, &[]).is_not_found());
    }
}
