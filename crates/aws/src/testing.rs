//! A replacement of AWS for tests: a list of expected calls with their answers.

use std::{cell::RefCell, collections::VecDeque, fs, path::Path};

use baton_job::exit::Failure;
use serde_json::{Value, json};

use crate::{
    api::{Api, Error},
    stack::Stack,
};

/// One expected call and its answer.
struct ExpectedCall {
    /// Text that the arguments, joined by spaces, must contain.
    call: String,
    answer: Result<Vec<u8>, Error>,
    /// File that the call writes to the folder given by its last argument.
    file: Option<(String, Vec<u8>)>,
}

/// Expected calls in order.
#[derive(Default)]
pub(super) struct ScriptedApi {
    expected: RefCell<VecDeque<ExpectedCall>>,
    called: RefCell<Vec<String>>,
}

impl ScriptedApi {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn answer(self, call: &str, answer: Value) -> Self {
        let text = if answer.is_null() { String::new() } else { answer.to_string() };
        self.bytes(call, text.as_bytes())
    }

    pub(super) fn bytes(self, call: &str, answer: &[u8]) -> Self {
        self.expect(call, Ok(answer.to_owned()))
    }

    /// Expects a call that writes a file to the folder given by its last argument.
    pub(super) fn file(self, call: &str, name: &str, text: &[u8]) -> Self {
        let script = self.bytes(call, b"");
        if let Some(expected) = script.expected.borrow_mut().back_mut() {
            expected.file = Some((name.to_owned(), text.to_owned()));
        }
        script
    }

    pub(super) fn error(self, call: &str, code: &str, message: &str) -> Self {
        self.expect(call, Err(error(call, code, message)))
    }

    fn expect(self, call: &str, answer: Result<Vec<u8>, Error>) -> Self {
        self.expected.borrow_mut().push_back(ExpectedCall {
            call: call.to_owned(),
            answer,
            file: None,
        });
        self
    }

    /// Number of calls still expected.
    pub(super) fn len(&self) -> usize {
        self.expected.borrow().len()
    }

    /// Makes call `index` fail and removes those after it; also returns the text of that call.
    pub(super) fn failing_at(self, index: usize, code: &str) -> (Self, String) {
        let mut expected = self.expected.borrow_mut();
        expected.truncate(index + 1);
        let last = &mut expected[index];
        last.answer = Err(error(&last.call, code, "because of a test"));
        let call = last.call.clone();
        drop(expected);
        (self, call)
    }

    /// All calls so far.
    pub(super) fn called(&self) -> Vec<String> {
        self.called.borrow().clone()
    }
}

fn error(call: &str, code: &str, message: &str) -> Error {
    Error::parse(
        &format!("An error occurred ({code}) when calling the {call} operation: {message}"),
        &[],
    )
}

impl Api for ScriptedApi {
    fn call(&self, arguments: &[&str]) -> Result<Vec<u8>, Error> {
        let call = arguments.join(" ");
        self.called.borrow_mut().push(call.clone());
        let expected = self.expected.borrow_mut().pop_front();
        let expected =
            expected.unwrap_or_else(|| panic!("unexpected call: {}", &call[..call.len().min(200)]));
        assert!(
            call.contains(&expected.call),
            "expected {}, not: {}",
            expected.call,
            &call[..call.len().min(200)]
        );
        if let (Some((name, text)), Some(folder)) = (expected.file, arguments.last()) {
            let file = Path::new(folder).join(name);
            file.parent().map(fs::create_dir_all).transpose().unwrap();
            fs::write(file, text).unwrap();
        }
        expected.answer
    }
}

/// Makes each call of a script fail once, and checks that `run` then fails with one line that names the call and a
/// remedy.
pub(super) fn break_each<T>(
    script: impl Fn() -> ScriptedApi,
    run: impl Fn(&ScriptedApi) -> Result<T, Failure>,
) {
    for index in 0..script().len() {
        let (api, call) = script().failing_at(index, "AccessDenied");
        let Err(Failure { message, .. }) = run(&api) else {
            panic!("the failure of {call} was ignored")
        };
        let is_explained = message.contains(&call) && message.contains("deploy/aws/README.md");
        assert!(is_explained && !message.contains('\n'), "{call}: {message}");
    }
}

/// Answers to the calls that find the only job of a region, if no name is given.
pub(super) fn launched_answers(nodes: &str) -> ScriptedApi {
    let parameters = [("Bucket", "bucket"), ("Job", "digits"), ("Nodes", nodes)];
    let stacks = || json!({"Stacks": [stack("CREATE_COMPLETE", &parameters)]});
    ScriptedApi::new()
        .answer("describe-stacks", stacks())
        .answer("describe-stacks --stack-name baton-digits", stacks())
}

/// A stack as AWS describes it.
pub(super) fn stack(status: &str, parameters: &[(&str, &str)]) -> Value {
    let parameters: Vec<Value> = parameters
        .iter()
        .map(|(key, value)| json!({"ParameterKey": key, "ParameterValue": value}))
        .collect();
    json!({"StackName": "baton-digits", "StackStatus": status, "Parameters": parameters, "Tags": [{"Key": "baton:job", "Value": "digits"}]})
}

/// The stack of a job on `nodes` nodes.
pub(super) fn stack_of(nodes: &str) -> Stack {
    Stack {
        status: "CREATE_COMPLETE".to_owned(),
        parameters: [
            ("Bucket", "bucket"),
            ("Job", "digits"),
            ("Nodes", nodes),
            ("InstanceType", "p4d.24xlarge"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into(),
        outputs: [].into(),
    }
}

/// Adds the answers to a query of the group and its machines.
pub(super) fn fleet_answers(script: ScriptedApi, desired: u64, instances: &[&str]) -> ScriptedApi {
    let members: Vec<Value> = instances
        .iter()
        .map(|id| json!({"InstanceId": id, "LifecycleState": "InService"}))
        .collect();
    let machines: Vec<Value> = instances
        .iter()
        .map(|id| {
            json!({"InstanceId": id, "InstanceType": "p4d.24xlarge", "LaunchTime": "2026-11-22T09:00:00Z", "State": {"Name": "running"},
                "Placement": {"AvailabilityZone": "us-east-1a"}, "Tags": [{"Key": "aws:autoscaling:groupName", "Value": "baton-digits"}]})
        })
        .collect();
    script
        .answer(
            "describe-auto-scaling-groups",
            json!({"AutoScalingGroups": [{"DesiredCapacity": desired, "Instances": members}]}),
        )
        .answer("describe-instances", json!({"Reservations": [{"Instances": machines}]}))
}

/// Adds the answers to a query of everything that machines have reported.
pub(super) fn report_answers(script: ScriptedApi) -> ScriptedApi {
    let object =
        json!({"Key": "digits/machines/i-1/status.json", "LastModified": "2026-11-22T10:00:00Z"});
    script
        .file("s3 cp", "i-1/stage.json", br#"{"time": 7, "stage": "completed"}"#)
        .answer("list-objects-v2", json!({"Contents": [object]}))
        .bytes(
            "machines/i-1/status.json",
            br#"{"time": 9, "text": "training", "status": {"phase": "training"}}"#,
        )
}
