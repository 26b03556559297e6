//! Runs a template.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use super::access::{attribute, compare, hashable, item, no_operand};
use super::parser::{Arguments, Expr, For, Macro, Postfix, Statement, Target, What};
use super::text::{self, Text};
use super::value::{Closure, Dict, Kind, Loop, Value};
use super::{FUEL, Fail, MAX_OUTPUT, MAX_TEXT, filters, format, markup, methods, tests};

/// Most expressions, blocks and macros within each other while running.
const DEPTH: usize = 180;
/// Most lists and dicts within each other, more than a JSON document may have.
const NESTING: usize = 160;

/// What a statement ends with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    On,
    Break,
    Continue,
}

#[derive(Default)]
struct Scope {
    variables: Vec<(Arc<str>, Value)>,
    parent: Option<usize>,
}

/// The arguments of a call.
#[derive(Debug, Default)]
pub(super) struct Args {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Arc<str>, Value)>,
}

impl Args {
    /// The values of these parameters; nothing may be left.
    pub(super) fn bind<const N: usize>(
        self,
        what: &str,
        names: [&str; N],
    ) -> Result<[Option<Value>; N], Fail> {
        let mut values = [const { None }; N];
        if self.positional.len() > N {
            let got = self.positional.len();
            return Err(Fail::new(format!("`{what}` takes at most {N} arguments, got {got}")));
        }
        for (slot, value) in values.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            let slot = names.iter().position(|n| **n == *name).map(|i| &mut values[i]);
            match slot {
                Some(slot @ None) => *slot = Some(value),
                Some(_) => return Err(Fail::new(format!("`{what}` got `{name}` twice"))),
                None => return Err(Fail::new(format!("`{what}` has no argument `{name}`"))),
            }
        }
        Ok(values)
    }
}

/// A template on its way.
pub(super) struct Run {
    pub(super) out: Vec<u32>,
    scopes: Vec<Scope>,
    /// The innermost one.
    scope: usize,
    fuel: u64,
    room: usize,
    depth: usize,
    /// Macros made: they keep their scopes.
    macros: usize,
    /// All of them: they may hold each other.
    pub(super) namespaces: Vec<Rc<RefCell<Dict>>>,
    pub(super) now: Option<u64>,
}

impl Drop for Run {
    fn drop(&mut self) {
        // One by one, since each may be the only one to hold another, and that again.
        self.namespaces.iter().for_each(|fields| drop(fields.take()));
    }
}

impl Run {
    pub(super) fn new(variables: Vec<(Arc<str>, Value)>, now: Option<u64>) -> Self {
        let root = Scope { variables, parent: None };
        // Below it what the template sets.
        let scopes = vec![root, Scope { variables: Vec::new(), parent: Some(0) }];
        Self {
            out: Vec::new(),
            scopes,
            scope: 1,
            fuel: FUEL,
            room: MAX_TEXT,
            depth: 0,
            macros: 0,
            namespaces: Vec::new(),
            now,
        }
    }

    pub(super) fn whole(&mut self, body: &[Statement]) -> Result<(), Fail> {
        self.body(body).map(|_| ())
    }

    /// Counts a step.
    fn step(&mut self) -> Result<(), Fail> {
        self.work(1)
    }

    pub(super) fn work(&mut self, steps: usize) -> Result<(), Fail> {
        self.fuel = self
            .fuel
            .checked_sub(steps as u64)
            .ok_or_else(|| Fail::new(format!("should render within {FUEL} steps")))?;
        Ok(())
    }

    /// Counts characters or items that are about to be made.
    pub(super) fn spend(&mut self, units: usize) -> Result<(), Fail> {
        self.room = self
            .room
            .checked_sub(units)
            .ok_or_else(|| Fail::new(format!("should make at most {MAX_TEXT} characters on the way")))?;
        Ok(())
    }

    /// A text that was made.
    pub(super) fn made(&mut self, units: Vec<u32>) -> Result<Value, Fail> {
        self.spend(units.len())?;
        Ok(units.into())
    }

    fn deeper<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T, Fail>) -> Result<T, Fail> {
        if self.depth == DEPTH {
            return Err(Fail::new(format!("should go at most {DEPTH} blocks, brackets and macros deep")));
        }
        self.depth += 1;
        let result = run(self);
        self.depth -= 1;
        result
    }

    /// Runs in a scope of its own below `parent`.
    fn scoped<T>(
        &mut self,
        parent: usize,
        run: impl FnOnce(&mut Self) -> Result<T, Fail>,
    ) -> Result<T, Fail> {
        let (outer, macros, len) = (self.scope, self.macros, self.scopes.len());
        self.scope = len;
        self.scopes.push(Scope { variables: Vec::new(), parent: Some(parent) });
        let result = run(self);
        self.scope = outer;
        if self.macros == macros {
            self.scopes.truncate(len);
        }
        result
    }

    fn find(&self, name: &str) -> Option<&Value> {
        let mut at = Some(self.scope);
        while let Some(scope) = at {
            let scope = &self.scopes[scope];
            if let Some((_, value)) = scope.variables.iter().rev().find(|(n, _)| **n == *name) {
                return Some(value);
            }
            at = scope.parent;
        }
        None
    }

    fn lookup(&self, name: &str) -> Value {
        if let Some(value) = self.find(name) {
            return value.clone();
        }
        match super::FUNCTIONS.iter().find(|f| **f == name) {
            Some(function) => Value::Function(function),
            None => Value::undefined(format!("'{name}' is undefined")),
        }
    }

    fn set(&mut self, name: &Arc<str>, value: Value) {
        let variables = &mut self.scopes[self.scope].variables;
        match variables.iter_mut().find(|(n, _)| n == name) {
            Some(entry) => entry.1 = value,
            None => variables.push((Arc::clone(name), value)),
        }
    }

    fn assign(&mut self, target: &Target, value: Value) -> Result<(), Fail> {
        match target {
            Target::Name(name) => self.set(name, value),
            Target::Field(name, field) => match self.lookup(name) {
                Value::Namespace(fields) if !field.starts_with('_') => {
                    fields.borrow_mut().insert((&**field).into(), value);
                }
                Value::Namespace(_) => return Err(Fail::new(format!("`{field}` should not begin with `_`"))),
                other => {
                    let rule = format!("`{name}` should be a namespace, is of type `{}`", other.type_name());
                    return Err(Fail::new(rule));
                }
            },
            Target::Tuple(targets) => {
                let items = value.items()?;
                if items.len() != targets.len() {
                    let rule =
                        format!("{} values should be unpacked, there are {}", targets.len(), items.len());
                    return Err(Fail::new(rule));
                }
                for (target, item) in targets.iter().zip(items.iter()) {
                    self.assign(target, item.clone())?;
                }
            }
        }
        Ok(())
    }

    fn body(&mut self, body: &[Statement]) -> Result<Flow, Fail> {
        for statement in body {
            self.step()?;
            let flow =
                self.deeper(|run| run.statement(&statement.what)).map_err(|e| e.in_line(statement.line))?;
            if flow != Flow::On {
                return Ok(flow);
            }
        }
        Ok(Flow::On)
    }

    fn write(&mut self, units: &[u32]) -> Result<(), Fail> {
        if self.out.len() + units.len() > MAX_OUTPUT {
            return Err(Fail::new(format!("output should have at most {MAX_OUTPUT} characters")));
        }
        self.out.extend_from_slice(units);
        Ok(())
    }

    /// What `run` writes.
    fn captured(&mut self, run: impl FnOnce(&mut Self) -> Result<(), Fail>) -> Result<Vec<u32>, Fail> {
        let outer = std::mem::take(&mut self.out);
        let result = run(self);
        let inner = std::mem::replace(&mut self.out, outer);
        result?;
        self.spend(inner.len())?;
        Ok(inner)
    }

    fn captured_body(&mut self, body: &[Statement]) -> Result<Value, Fail> {
        let scope = self.scope;
        self.captured(|run| run.scoped(scope, |run| run.whole(body))).map(Value::from)
    }

    fn statement(&mut self, what: &What) -> Result<Flow, Fail> {
        match what {
            What::Data(data) => self.write(data)?,
            What::Output(value) => {
                let value = self.value(value)?.string();
                self.write(&value)?;
            }
            What::If(branches, otherwise) => {
                for (condition, body) in branches {
                    if self.value(condition)?.is_true() {
                        return self.body(body);
                    }
                }
                return self.body(otherwise);
            }
            What::For(statement) => self.for_loop(statement)?,
            What::Set(target, value) => {
                let value = self.value(value)?;
                self.assign(target, value)?;
            }
            What::SetBlock(target, filters, body) => {
                let text = self.captured_body(body)?;
                let text = self.postfix(text, filters)?;
                self.assign(target, text)?;
            }
            What::Macro(made) => {
                let closure = self.closure(made);
                self.set(&made.name, closure);
            }
            What::Call(call, made) => {
                let caller = self.closure(made);
                let value = self.call_with(call, caller)?.string();
                self.write(&value)?;
            }
            What::Filter(filters, body) => {
                let text = self.captured_body(body)?;
                let text = self.postfix(text, filters)?.string();
                self.write(&text)?;
            }
            What::With(values, body) => {
                let given = values.iter().map(|(_, v)| self.value(v)).collect::<Result<Vec<_>, _>>()?;
                let scope = self.scope;
                return self.scoped(scope, |run| {
                    for ((target, _), value) in values.iter().zip(given) {
                        run.assign(target, value)?;
                    }
                    run.body(body)
                });
            }
            What::Scope(body) => {
                let scope = self.scope;
                return self.scoped(scope, |run| run.body(body));
            }
            What::Break => return Ok(Flow::Break),
            What::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::On)
    }

    fn for_loop(&mut self, statement: &Arc<For>) -> Result<(), Fail> {
        let over = self.value(&statement.over)?;
        let scope = self.scope;
        self.run_loop(statement, &over, scope, 0)
    }

    fn run_loop(
        &mut self,
        statement: &Arc<For>,
        over: &Value,
        scope: usize,
        depth: usize,
    ) -> Result<(), Fail> {
        let mut items = over.items()?;
        self.work(items.len())?;
        if let Some(only) = &statement.only {
            let mut kept = Vec::new();
            for item in items.iter() {
                let keep = self.scoped(scope, |run| {
                    run.assign(&statement.target, item.clone())?;
                    run.value(only)
                })?;
                if keep.is_true() {
                    kept.push(item.clone());
                }
            }
            items = Rc::new(kept.into());
        }
        if items.is_empty() {
            return self.scoped(scope, |run| run.body(&statement.otherwise).map(|_| ()));
        }
        let state = Rc::new(Loop {
            items: Rc::clone(&items),
            index: Cell::new(0),
            depth,
            last_changed: RefCell::default(),
            again: statement.recursive.then(|| (Arc::clone(statement), scope)),
        });
        let name: Arc<str> = "loop".into();
        for (index, item) in items.iter().enumerate() {
            state.index.set(index);
            let flow = self.scoped(scope, |run| {
                run.set(&name, Value::Loop(Rc::clone(&state)));
                run.assign(&statement.target, item.clone())?;
                run.body(&statement.body)
            })?;
            if flow == Flow::Break {
                break;
            }
        }
        Ok(())
    }

    fn closure(&mut self, made: &Arc<Macro>) -> Value {
        self.macros += 1;
        Value::Macro(Rc::new(Closure { made: Arc::clone(made), scope: self.scope }))
    }

    fn call_macro(&mut self, closure: &Closure, args: Args) -> Result<Value, Fail> {
        let made = &closure.made;
        let text = self.deeper(|run| {
            run.captured(|run| {
                run.scoped(closure.scope, |run| {
                    run.macro_arguments(made, args)?;
                    run.whole(&made.body)
                })
            })
        })?;
        Ok(text.into())
    }

    fn macro_arguments(&mut self, made: &Macro, args: Args) -> Result<(), Fail> {
        let Args { positional, mut named } = args;
        let mut positional = positional.into_iter();
        let refuse = |rule: String| Err(Fail::new(format!("macro `{}` {rule}", made.name)));
        for (name, default) in &made.parameters {
            let by_name = named.iter().position(|(n, _)| n == name).map(|at| named.remove(at).1);
            let value = match (positional.next(), by_name, default) {
                (Some(_), Some(_), _) => return refuse(format!("got `{name}` twice")),
                (Some(value), None, _) | (None, Some(value), _) => value,
                (None, None, Some(default)) => self.value(default)?,
                (None, None, None) => Value::undefined(format!("parameter '{name}' was not provided")),
            };
            self.set(name, value);
        }
        let more: Vec<Value> = positional.collect();
        if made.caller {
            let caller = named.iter().position(|(n, _)| &**n == "caller").map(|at| named.remove(at).1);
            let none = || Value::undefined("No caller defined");
            self.set(&"caller".into(), caller.unwrap_or_else(none));
        }
        if made.varargs {
            self.set(&"varargs".into(), Value::tuple(more));
        } else if !more.is_empty() {
            return refuse(format!("takes at most {} arguments", made.parameters.len()));
        }
        if made.kwargs {
            let named = named.into_iter().map(|(n, v)| ((&*n).into(), v)).collect();
            self.set(&"kwargs".into(), Value::dict(named));
        } else if let Some((name, _)) = named.first() {
            return refuse(format!("has no parameter `{name}`"));
        }
        Ok(())
    }

    /// A call whose callee gets what stands between the tags as `caller`.
    fn call_with(&mut self, call: &Expr, caller: Value) -> Result<Value, Fail> {
        let Expr::Postfix(base, posts) = call else { return Err(Fail::new("`call` should have a call")) };
        let Some((Postfix::Call(arguments), before)) = posts.split_last() else {
            return Err(Fail::new("`call` should have a call"));
        };
        let callee = self.value(base)?;
        let callee = self.postfix(callee, before)?;
        let mut args = self.arguments(arguments)?;
        args.named.push(("caller".into(), caller));
        self.call(&callee, args)
    }

    pub(super) fn value(&mut self, expr: &Expr) -> Result<Value, Fail> {
        self.step()?;
        Ok(match expr {
            Expr::None => Value::None,
            Expr::Bool(b) => Value::Bool(*b),
            Expr::Integer(i) => Value::Integer(*i),
            Expr::Float(f) => Value::Float(*f),
            Expr::Text(t) => Value::Text(Arc::clone(t).into()),
            Expr::Name(name) => self.lookup(name),
            _ => return self.deeper(|run| run.compound(expr)).and_then(not_too_deep),
        })
    }

    fn values(&mut self, exprs: &[Expr]) -> Result<Vec<Value>, Fail> {
        exprs.iter().map(|e| self.value(e)).collect()
    }

    fn compound(&mut self, expr: &Expr) -> Result<Value, Fail> {
        Ok(match expr {
            Expr::List(items) => Value::list(self.values(items)?),
            Expr::Tuple(items) => Value::tuple(self.values(items)?),
            Expr::Dict(entries) => {
                let mut dict = Dict::default();
                for (key, value) in entries {
                    let (key, value) = (self.value(key)?, self.value(value)?);
                    dict.insert(hashable(key)?, value);
                }
                Value::Dict(Rc::new(dict))
            }
            Expr::Postfix(base, posts) => {
                let base = self.value(base)?;
                return self.postfix(base, posts);
            }
            Expr::Not(value) => Value::Bool(!self.value(value)?.is_true()),
            Expr::Negative(value) => match self.value(value)? {
                Value::Float(f) => Value::Float(-f),
                other => match other.integer().map(i64::checked_neg) {
                    Some(n) => Value::Integer(n.ok_or_else(too_large)?),
                    None => return Err(no_operand("-", &other)),
                },
            },
            Expr::Positive(value) => {
                let value = self.value(value)?;
                value.number().ok_or_else(|| no_operand("+", &value))?;
                value
            }
            Expr::Chain(first, rest) => {
                let mut value = self.value(first)?;
                for (operator, operand) in rest {
                    let operand = self.value(operand)?;
                    value = self.arithmetic(operator, &value, &operand)?;
                }
                value
            }
            Expr::Concat(all) => {
                let mut joined = Vec::new();
                for value in all {
                    joined.extend_from_slice(&self.value(value)?.string());
                }
                return self.made(joined);
            }
            Expr::And(all) | Expr::Or(all) => {
                let stop = matches!(expr, Expr::Or(_));
                let mut value = Value::None;
                for one in all {
                    value = self.value(one)?;
                    if value.is_true() == stop {
                        break;
                    }
                }
                value
            }
            Expr::Compare(first, rest) => {
                let mut left = self.value(first)?;
                for (operator, operand) in rest {
                    let right = self.value(operand)?;
                    if !compare(operator, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Value::Bool(true)
            }
            Expr::Condition(parts) => {
                let (condition, value, otherwise) = &**parts;
                if self.value(condition)?.is_true() {
                    return self.value(value);
                }
                match otherwise {
                    Some(other) => return self.value(other),
                    None => Value::undefined("the condition of an `if` without `else` does not hold"),
                }
            }
            _ => return self.value(expr),
        })
    }

    fn arguments(&mut self, arguments: &Arguments) -> Result<Args, Fail> {
        let mut args = Args { positional: self.values(&arguments.positional)?, named: Vec::new() };
        for (name, value) in &arguments.named {
            args.named.push((Arc::clone(name), self.value(value)?));
        }
        if let Some(list) = &arguments.list {
            args.positional.extend(self.value(list)?.items()?.iter().cloned());
        }
        if let Some(dict) = &arguments.dict {
            let Value::Dict(dict) = self.value(dict)? else {
                return Err(Fail::new("what follows `**` should be a dict"));
            };
            for (key, value) in &dict.0 {
                args.named.push((text::plain(&key.string()).into(), value.clone()));
            }
        }
        Ok(args)
    }

    fn postfix(&mut self, mut value: Value, posts: &[Postfix]) -> Result<Value, Fail> {
        for post in posts {
            self.step()?;
            value = match post {
                Postfix::Attribute(name) => attribute(&value, name)?,
                Postfix::Item(key) => {
                    let key = self.value(key)?;
                    item(&value, &key)?
                }
                Postfix::Slice(parts) => {
                    let mut ends = [None; 3];
                    for (end, part) in ends.iter_mut().zip(parts.iter()) {
                        if let Some(part) = part {
                            *end = match self.value(part)? {
                                Value::None => None,
                                v => Some(v.integer().ok_or_else(|| no_operand("[:]", &v))?),
                            };
                        }
                    }
                    self.slice(&value, ends)?
                }
                Postfix::Call(arguments) => {
                    let args = self.arguments(arguments)?;
                    self.call(&value, args)?
                }
                Postfix::Filter(name, arguments) => {
                    let args = self.arguments(arguments)?;
                    self.deeper(|run| filters::apply(run, name, value, args))?
                }
                Postfix::Test { name, arguments, negated } => {
                    let args = self.arguments(arguments)?;
                    Value::Bool(tests::check(name, &value, args)? != *negated)
                }
            };
            value = not_too_deep(value)?;
        }
        Ok(value)
    }

    fn slice(&mut self, value: &Value, [start, stop, step]: [Option<i64>; 3]) -> Result<Value, Fail> {
        let len = match value {
            Value::Text(t) => t.len(),
            Value::Sequence(Kind::List | Kind::Tuple | Kind::Group | Kind::Range(_), items) => items.len(),
            Value::Undefined(what) => return Err(Fail::new(what.to_string())),
            other => {
                return Ok(Value::undefined(format!(
                    "a value of type `{}` has no slices",
                    other.type_name()
                )));
            }
        };
        let (len, step) = (len as i64, step.unwrap_or(1));
        if step == 0 {
            return Err(Fail::new("the step of a slice should not be 0"));
        }
        let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
        let place = |end: Option<i64>, default: i64| match end {
            None => default,
            Some(i) if i < 0 => i.saturating_add(len).max(lowest),
            Some(i) => i.min(highest),
        };
        let (mut at, stop) = if step > 0 {
            (place(start, 0), place(stop, len))
        } else {
            (place(start, len - 1), place(stop, -1))
        };
        let mut picked = Vec::new();
        while if step > 0 { at < stop } else { at > stop } {
            picked.push(at as usize);
            at = at.saturating_add(step);
        }
        self.spend(picked.len())?;
        Ok(match value {
            Value::Text(t) => {
                let units: Vec<u32> = picked.into_iter().map(|i| t[i]).collect();
                Value::Text(Text::from(units).with_safety(t.safe))
            }
            Value::Sequence(kind, items) => {
                let picked: Vec<Value> = picked.into_iter().map(|i| items[i].clone()).collect();
                let kind = match kind {
                    Kind::Group => Kind::Tuple,
                    Kind::Range([.., by]) => {
                        let end = |v: Option<&Value>| v.and_then(Value::integer).unwrap_or(0);
                        let by = by.saturating_mul(step);
                        Kind::Range([end(picked.first()), end(picked.last()).saturating_add(by.signum()), by])
                    }
                    kind => *kind,
                };
                Value::sequence(kind, picked)
            }
            _ => Value::None,
        })
    }

    fn arithmetic(&mut self, operator: &str, a: &Value, b: &Value) -> Result<Value, Fail> {
        match (operator, a, b) {
            ("%", Value::Text(format), _) => return format::percent(self, format, b),
            ("+", Value::Text(_), Value::Text(_)) => return markup::added(self, a, b),
            ("+", Value::Sequence(k @ (Kind::List | Kind::Tuple), s), Value::Sequence(l, t)) if k == l => {
                self.spend(s.len() + t.len())?;
                return Ok(Value::sequence(*k, s.iter().chain(t.iter()).cloned().collect()));
            }
            ("*", Value::Text(s), n) | ("*", n, Value::Text(s)) if n.integer().is_some() => {
                let times = usize::try_from(n.integer().unwrap_or(0)).unwrap_or(0);
                self.spend(s.len().saturating_mul(times))?;
                return Ok(Value::Text(Text::from(s.repeat(times)).with_safety(s.safe)));
            }
            ("*", Value::Sequence(k @ (Kind::List | Kind::Tuple), s), n)
            | ("*", n, Value::Sequence(k @ (Kind::List | Kind::Tuple), s))
                if n.integer().is_some() =>
            {
                let times = usize::try_from(n.integer().unwrap_or(0)).unwrap_or(0);
                self.spend(s.len().saturating_mul(times))?;
                let items = (0..times).flat_map(|_| s.iter().cloned()).collect();
                return Ok(Value::sequence(*k, items));
            }
            _ => {}
        }
        let (Some(x), Some(y)) = (a.number(), b.number()) else {
            let wrong = if a.number().is_none() { a } else { b };
            return Err(no_operand(operator, wrong));
        };
        let zero = || Fail::new("division by zero");
        if let (Some(m), Some(n)) = (a.integer(), b.integer()) {
            let result = match operator {
                "+" => m.checked_add(n),
                "-" => m.checked_sub(n),
                "*" => m.checked_mul(n),
                "/" => return if n == 0 { Err(zero()) } else { Ok(Value::Float(x / y)) },
                "//" | "%" if n == 0 => return Err(zero()),
                "//" => {
                    m.checked_div_euclid(n).map(|q| if m.rem_euclid(n) != 0 && n < 0 { q - 1 } else { q })
                }
                "%" => m.checked_rem(n).map(|r| if r != 0 && (r < 0) != (n < 0) { r + n } else { r }),
                _ if n >= 0 => u32::try_from(n).ok().and_then(|n| m.checked_pow(n)),
                _ if m == 0 => return Err(zero()),
                _ => return Ok(Value::Float(x.powf(y))),
            };
            return result.map(Value::Integer).ok_or_else(too_large);
        }
        Ok(Value::Float(match operator {
            "+" => x + y,
            "-" => x - y,
            "*" => x * y,
            "/" | "//" | "%" if y == 0.0 => return Err(zero()),
            "/" => x / y,
            "//" => (x / y).floor(),
            "%" => {
                let r = x % y;
                if r != 0.0 && (r < 0.0) != (y < 0.0) { r + y } else { r }
            }
            _ => x.powf(y),
        }))
    }

    pub(super) fn call(&mut self, callee: &Value, args: Args) -> Result<Value, Fail> {
        match callee {
            Value::Undefined(what) => Err(Fail::new(what.to_string())),
            Value::Function(name) => self.function(name, args),
            Value::Method(receiver, name) => self.deeper(|run| methods::call(run, receiver, name, args)),
            Value::Macro(closure) => self.call_macro(closure, args),
            Value::Loop(state) => {
                let [over] = args.bind("loop", ["iterable"])?;
                let (Some((statement, scope)), Some(over)) = (&state.again, over) else {
                    return Err(Fail::new("a loop that is called should be `recursive` and get a list"));
                };
                let text = self.deeper(|run| {
                    run.captured(|run| run.run_loop(statement, &over, *scope, state.depth + 1))
                })?;
                Ok(text.into())
            }
            Value::Joiner(joiner) => {
                let [] = args.bind("joiner", [])?;
                Ok(if joiner.1.replace(true) { joiner.0.clone() } else { "".into() })
            }
            other => Err(Fail::new(format!("a value of type `{}` is no function", other.type_name()))),
        }
    }
}

fn not_too_deep(value: Value) -> Result<Value, Fail> {
    if value.depth() > NESTING {
        return Err(Fail::new(format!("lists and dicts should be nested at most {NESTING} deep")));
    }
    Ok(value)
}

fn too_large() -> Fail {
    Fail::new("an integer should fit in 64 bits")
}
