//! The CloudFormation stack of a job.

use std::{collections::BTreeMap, fmt, str::FromStr, thread, time::Duration};

use baton_console::{
    failure::{bad_input, failed},
    output,
};
use baton_job::exit::Failure;
use serde_json::{Value, json};

use crate::{api::Api, market::list};

/// CloudFormation template of everything that is created on AWS.
pub(super) const TEMPLATE: &str = include_str!("../../../deploy/aws/baton.yaml");
/// Prefix of the names of Baton's stacks.
const STACK_NAME_PREFIX: &str = "baton-";
/// Poll interval of a changing stack.
const STACK_POLL_INTERVAL: Duration = Duration::from_secs(4);

/// Name of a job, which is part of the names of its stack and group, and of its folder in the bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Job(String);

impl Job {
    pub(super) fn name(&self) -> &str {
        &self.0
    }

    /// Name of the job's stack and of its Auto Scaling group.
    pub(super) fn stack(&self) -> String {
        format!("{STACK_NAME_PREFIX}{}", self.0)
    }

    /// Makes a job name from a recipe's name, which may contain any characters.
    pub(super) fn of_recipe(name: &str) -> Result<Self, String> {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
        let text: String = name.chars().map(plain).take(32).collect();
        text.parse()
    }
}

impl FromStr for Job {
    type Err = String;

    /// Accepts what the template's `AllowedPattern` accepts.
    fn from_str(text: &str) -> Result<Self, String> {
        let is_valid = text.starts_with(|c: char| c.is_ascii_lowercase())
            && text.len() <= 32
            && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
        match is_valid {
            true => Ok(Self(text.to_owned())),
            false => Err(format!(
                "{text:?} is not a valid job name: use at most 32 lower-case letters, digits and -, beginning with a letter (--name)"
            )),
        }
    }
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A stack as AWS describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stack {
    pub(super) status: String,
    pub(super) parameters: BTreeMap<String, String>,
    pub(super) outputs: BTreeMap<String, String>,
}

impl Stack {
    fn parse(value: &Value) -> Self {
        let pairs = |list_key: &str, key: &str, value_key: &str| {
            let pair = |entry: &Value| {
                Some((entry[key].as_str()?.to_owned(), entry[value_key].as_str()?.to_owned()))
            };
            list(value, list_key).filter_map(pair).collect()
        };
        Self {
            status: value["StackStatus"].as_str().unwrap_or_default().to_owned(),
            parameters: pairs("Parameters", "ParameterKey", "ParameterValue"),
            outputs: pairs("Outputs", "OutputKey", "OutputValue"),
        }
    }

    pub(super) fn parameter(&self, name: &str) -> &str {
        self.parameters.get(name).map_or("", String::as_str)
    }

    /// URL of the job's folder in its bucket.
    pub(super) fn url(&self) -> String {
        format!("s3://{}/{}", self.parameter("Bucket"), self.parameter("Job"))
    }

    pub(super) fn has_several_nodes(&self) -> bool {
        self.parameter("Nodes") != "1"
    }

    /// Whether the creation of this stack failed, so that it must be deleted before its name can be used again.
    fn has_failed(&self) -> bool {
        [
            "ROLLBACK_COMPLETE",
            "ROLLBACK_FAILED",
            "CREATE_FAILED",
            "DELETE_FAILED",
            // `aws cloudformation deploy` leaves this status when it fails before it executes its change set.
            "REVIEW_IN_PROGRESS",
        ]
        .contains(&self.status.as_str())
    }

    fn is_changing(&self) -> bool {
        self.status.ends_with("_IN_PROGRESS") && !self.has_failed()
    }
}

/// The jobs that have a stack in this region.
pub(super) fn jobs(api: &impl Api) -> Result<Vec<Job>, Failure> {
    let answer = api.json(&["cloudformation", "describe-stacks"])?;
    let is_ours = |stack: &&Value| list(stack, "Tags").any(|tag| tag["Key"] == "baton:job");
    let name =
        |stack: &Value| stack["StackName"].as_str()?.strip_prefix(STACK_NAME_PREFIX)?.parse().ok();
    Ok(list(&answer, "Stacks").filter(is_ours).filter_map(name).collect())
}

/// The stack of a job, if there is one.
pub(super) fn find(api: &impl Api, job: &Job) -> Result<Option<Stack>, Failure> {
    let answer = api.find(&["cloudformation", "describe-stacks", "--stack-name", &job.stack()])?;
    let stack = answer.as_ref().and_then(|answer| list(answer, "Stacks").next()).map(Stack::parse);
    Ok(stack.filter(|stack| stack.status != "DELETE_COMPLETE"))
}

/// The stack of a job that must have one.
pub(super) fn get(api: &impl Api, job: &Job) -> Result<Stack, Failure> {
    find(api, job)?.ok_or_else(|| {
        bad_input(format!(
            "there is no job {job} in this region: `baton aws up RECIPE --name {job}` launches one"
        ))
    })
}

/// Creates the stack or updates the existing one, waits until that has finished, and prints the progress.
pub(super) fn deploy(
    api: &impl Api,
    job: &Job,
    parameters: &BTreeMap<&str, String>,
) -> Result<Stack, Failure> {
    let mut existing = find(api, job)?;
    if existing.as_ref().is_some_and(Stack::is_changing) {
        existing = Some(
            wait_while_changing(api, job, &mut StackEvents::from_now(api, job)?)?
                .ok_or_else(|| failed("the stack was deleted meanwhile: try again"))?,
        );
    }
    if existing.as_ref().is_some_and(|stack| stack.status == "UPDATE_ROLLBACK_FAILED") {
        return Err(bad_input(format!(
            "a change of the stack {0} failed and could not be undone: `aws cloudformation continue-update-rollback --stack-name {0}` \
             tries again, `baton aws down --name {job}` removes it",
            job.stack()
        )));
    }
    if existing.as_ref().is_some_and(Stack::has_failed) {
        output::note(format_args!(
            "removing the failed stack {} of an earlier launch",
            job.stack()
        ));
        delete(api, job)?;
        existing = None;
    }
    let listed: Vec<Value> = parameters
        .iter()
        .map(|(key, value)| json!({"ParameterKey": key, "ParameterValue": value}))
        .collect();
    let listed = Value::from(listed).to_string();
    let tags = json!([{"Key": "baton:job", "Value": job.name()}]).to_string();
    let verb = if existing.is_some() { "update-stack" } else { "create-stack" };
    let mut events = StackEvents::from_now(api, job)?;
    let name = job.stack();
    let arguments = [
        "cloudformation",
        verb,
        "--stack-name",
        &name,
        "--template-body",
        TEMPLATE,
        "--parameters",
        &listed,
        "--tags",
        &tags,
        "--capabilities",
        "CAPABILITY_IAM",
    ];
    match api.json(&arguments) {
        Ok(_) => {}
        // Nothing has changed, for instance when a drained job is resumed.
        Err(error) if error.message().contains("No updates are to be performed") => {}
        Err(error) => return Err(error.into()),
    }
    let stack = wait_while_changing(api, job, &mut events)?;
    match stack {
        Some(stack) if ["CREATE_COMPLETE", "UPDATE_COMPLETE"].contains(&stack.status.as_str()) => {
            Ok(stack)
        }
        stack => {
            let status = stack.map_or_else(|| "deleted".to_owned(), |stack| stack.status);
            let why = events.first_failure.unwrap_or_else(|| format!("its status is {status}"));
            Err(failed(format!(
                "the stack {name} cannot be created: {why}; `baton aws down --name {job}` removes its remains"
            )))
        }
    }
}

/// Deletes the stack and waits until it is deleted.
pub(super) fn delete(api: &impl Api, job: &Job) -> Result<(), Failure> {
    let mut events = StackEvents::from_now(api, job)?;
    api.json(&["cloudformation", "delete-stack", "--stack-name", &job.stack()])?;
    match wait_while_changing(api, job, &mut events)? {
        None => Ok(()),
        Some(stack) => {
            let why = events.first_failure.unwrap_or(stack.status);
            Err(failed(format!(
                "the stack {} cannot be deleted: {why}; fix that, then run `baton aws down --name {job}` again",
                job.stack()
            )))
        }
    }
}

/// Waits while the stack changes, and prints its events; `None` if the stack no longer exists.
fn wait_while_changing(
    api: &impl Api,
    job: &Job,
    events: &mut StackEvents,
) -> Result<Option<Stack>, Failure> {
    loop {
        let stack = find(api, job)?;
        events.print_new(api, job)?;
        match stack {
            Some(stack) if stack.is_changing() => thread::sleep(STACK_POLL_INTERVAL),
            stack => return Ok(stack),
        }
    }
}

/// Events of a stack, printed as they happen.
struct StackEvents {
    /// Ids of the events already printed or skipped.
    seen_ids: Vec<String>,
    /// The first failed resource with its reason; later failures are consequences of it.
    first_failure: Option<String>,
}

impl StackEvents {
    /// Skips all events until now.
    fn from_now(api: &impl Api, job: &Job) -> Result<Self, Failure> {
        let mut events = Self { seen_ids: Vec::new(), first_failure: None };
        events.seen_ids = events.unseen(api, job)?.into_iter().map(|(id, _)| id).collect();
        Ok(events)
    }

    fn print_new(&mut self, api: &impl Api, job: &Job) -> Result<(), Failure> {
        for (id, event) in self.unseen(api, job)? {
            self.seen_ids.push(id);
            let text = |key: &str| event[key].as_str().unwrap_or_default();
            let (resource, status, reason) =
                (text("LogicalResourceId"), text("ResourceStatus"), text("ResourceStatusReason"));
            if resource == job.stack() {
                continue;
            }
            if status.ends_with("_FAILED") {
                let why = format!("{resource}: {reason}");
                output::note(format_args!("  {why}"));
                self.first_failure.get_or_insert(why);
            } else if let Some(done) = status.strip_suffix("_COMPLETE") {
                let verb = match done {
                    "CREATE" => "created",
                    "UPDATE" => "updated",
                    "DELETE" => "deleted",
                    _ => done,
                };
                output::note(format_args!("  {resource} is {verb}"));
            }
        }
        Ok(())
    }

    /// Events not seen yet with their ids, oldest first.
    fn unseen(&self, api: &impl Api, job: &Job) -> Result<Vec<(String, Value)>, Failure> {
        let answer =
            api.find(&["cloudformation", "describe-stack-events", "--stack-name", &job.stack()])?;
        let answer = answer.unwrap_or_default();
        let mut unseen: Vec<_> = list(&answer, "StackEvents")
            .filter_map(|event| Some((event["EventId"].as_str()?.to_owned(), event.clone())))
            .filter(|(id, _)| !self.seen_ids.contains(id))
            .collect();
        unseen.reverse();
        Ok(unseen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ScriptedApi, stack};

    fn job() -> Job {
        "digits".parse().unwrap()
    }

    #[test]
    fn a_recipes_name_becomes_a_name_that_aws_accepts() {
        assert_eq!(Job::of_recipe("ResNet50_p4d 60ep").unwrap().name(), "resnet50-p4d-60ep");
        for bad in ["", "9lives", "Capital", "under_score", &"x".repeat(33)] {
            assert!(bad.parse::<Job>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_failed_stack_is_reported_with_its_first_failure() {
        let event = |id: &str, resource: &str, status: &str, reason: &str| json!({"EventId": id, "LogicalResourceId": resource, "ResourceStatus": status, "ResourceStatusReason": reason});
        let api = ScriptedApi::new()
            .error(
                "describe-stacks",
                "ValidationError",
                "Stack with id baton-digits does not exist",
            )
            .error(
                "describe-stack-events",
                "ValidationError",
                "Stack [baton-digits] does not exist",
            )
            .answer("create-stack", json!({"StackId": "id"}))
            .answer("describe-stacks", json!({"Stacks": [stack("ROLLBACK_COMPLETE", &[])]}))
            .answer(
                "describe-stack-events",
                json!({"StackEvents": [
                event("3", "SecurityGroup", "DELETE_COMPLETE", ""),
                event("2", "Group", "CREATE_FAILED", "Resource creation cancelled"),
                event("1", "Role", "CREATE_FAILED", "not authorized to perform: iam:CreateRole")]}),
            );
        let error = deploy(&api, &job(), &BTreeMap::new()).unwrap_err();
        assert!(
            error.message.contains("Role: not authorized to perform: iam:CreateRole"),
            "{error}"
        );
        assert!(error.message.contains("baton aws down --name digits"), "{error}");
    }

    #[test]
    fn an_unchanged_stack_is_not_an_error() {
        let existing = || json!({"Stacks": [stack("CREATE_COMPLETE", &[("Bucket", "b"), ("Job", "digits"), ("Nodes", "1")])]});
        let api = ScriptedApi::new()
            .answer("describe-stacks", existing())
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .error("update-stack", "ValidationError", "No updates are to be performed.")
            .answer("describe-stacks", existing())
            .answer("describe-stack-events", json!({"StackEvents": []}));
        let stack = deploy(&api, &job(), &BTreeMap::new()).unwrap();
        assert_eq!((stack.url().as_str(), stack.has_several_nodes()), ("s3://b/digits", false));
    }

    #[test]
    fn the_failed_stack_of_an_earlier_launch_is_removed_first() {
        let api = ScriptedApi::new()
            .answer("describe-stacks", json!({"Stacks": [stack("ROLLBACK_COMPLETE", &[])]}))
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .answer("delete-stack", Value::Null)
            .error(
                "describe-stacks",
                "ValidationError",
                "Stack with id baton-digits does not exist",
            )
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .answer("create-stack", json!({"StackId": "id"}))
            .answer("describe-stacks", json!({"Stacks": [stack("CREATE_COMPLETE", &[])]}))
            .answer("describe-stack-events", json!({"StackEvents": []}));
        assert_eq!(deploy(&api, &job(), &BTreeMap::new()).unwrap().status, "CREATE_COMPLETE");
    }
}
