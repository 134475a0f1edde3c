//! Templates that can do no harm in any process: nothing that they make is longer than some times their input, and each of their steps takes
//! no longer than to copy that.
//!
//! Only what is listed here may occur. A value's *size* is a bound of its bytes, in units of the input and the template together. Texts that are
//! put together have the sum of their parts, and no more than [`SIZE_MAX`]; what a loop puts together must not grow from turn to turn. Most
//! templates that only arrange messages are plain, and those with macros, namespaces or lists of tools are not.

use super::{content::TemplateText, engine, source};
use minijinja::machinery::{
    ast::{BinOpKind, CallArg, Expr, ForLoop, IfCond, Stmt},
    parse,
};
use std::collections::BTreeMap;

/// The bytes of a template and its special tokens, and of the JSON of one input.
pub(super) const BYTES_MAX: usize = 8 << 10;
/// The instructions of one rendering. Each copies at most [`SIZE_MAX`] units of 16 KiB: in all 8 GB, which take about a second at worst.
pub(super) const FUEL: u64 = 20_000;

/// The largest size of a value.
const SIZE_MAX: u32 = 24;
/// The most loops in one another: their bodies are looked at twice.
const LOOPS_MAX: u32 = 4;
/// The factors by which printing a value that is no text, and writing one as JSON, may lengthen it: all of its characters may be escaped.
const PRINTED: u32 = 3;
const AS_JSON: u32 = 6;
/// The longest format of a date.
const DATE_BYTES_MAX: usize = 64;

pub(super) fn is_plain(text: &TemplateText) -> bool {
    let specials = text.specials.iter().map(|(name, token)| name.len() + token.len());
    if text.source.len() + specials.sum::<usize>() > BYTES_MAX {
        return false;
    }
    let (Ok(adapted), Ok(syntax)) = (source::adapted(&text.source), engine::syntax()) else { return false };
    let Ok(Stmt::Template(template)) = parse(&adapted, "chat", syntax) else { return false };
    Sizes::default().body(&template.children, 0).is_some()
}

/// The sizes of the variables that are set. All others are parts of the input.
#[derive(Clone, Default, PartialEq)]
struct Sizes<'a>(BTreeMap<&'a str, u32>);

impl<'a> Sizes<'a> {
    /// Takes the larger size of each variable.
    fn join(&mut self, other: Self) {
        for (name, size) in other.0 {
            let known = self.0.entry(name).or_insert(size);
            *known = size.max(*known);
        }
    }

    /// Goes through statements; `None` if they are not plain.
    fn body(&mut self, body: &[Stmt<'a>], loops: u32) -> Option<()> {
        body.iter().try_for_each(|statement| match statement {
            Stmt::EmitRaw(_) => Some(()),
            Stmt::EmitExpr(emit) => self.printed(&emit.expr).map(drop),
            Stmt::IfCond(condition) => self.condition(condition, loops),
            Stmt::ForLoop(every) => self.every(every, loops),
            Stmt::Set(set) => {
                let Expr::Var(target) = &set.target else { return None };
                let size = self.size(&set.expr)?;
                self.0.insert(target.id, size);
                Some(())
            }
            _ => None,
        })
    }

    fn condition(&mut self, condition: &IfCond<'a>, loops: u32) -> Option<()> {
        self.size(&condition.expr)?;
        let mut otherwise = self.clone();
        self.body(&condition.true_body, loops)?;
        otherwise.body(&condition.false_body, loops)?;
        self.join(otherwise);
        Some(())
    }

    fn every(&mut self, every: &ForLoop<'a>, loops: u32) -> Option<()> {
        if every.recursive || loops == LOOPS_MAX {
            return None;
        }
        let size = self.size(&every.iter)?;
        let targets = match &every.target {
            Expr::Tuple(targets) => targets.items.iter().collect(),
            Expr::List(targets) => targets.items.iter().collect(),
            target => vec![target],
        };
        let targets = targets.into_iter().map(|target| if let Expr::Var(name) = target { Some(name.id) } else { None });
        let targets = targets.collect::<Option<Vec<_>>>()?;
        let turn = |before: &Self| {
            let mut after = before.clone();
            after.0.extend(targets.iter().copied().chain(["loop"]).map(|name| (name, size)));
            every.filter_expr.as_ref().map_or(Some(0), |expr| after.size(expr))?;
            after.body(&every.body, loops + 1)?;
            after.join(before.clone());
            Some(after)
        };
        let after_one = turn(self)?;
        if turn(&after_one)? != after_one {
            return None;
        }
        *self = after_one;
        self.body(&every.else_body, loops)
    }

    /// The size of an expression's value; `None` if it is not plain.
    fn size(&self, expr: &Expr<'a>) -> Option<u32> {
        let size = match expr {
            Expr::Const(_) => 1,
            Expr::Var(name) => self.0.get(name.id).copied().unwrap_or(1),
            Expr::GetAttr(attribute) => self.size(&attribute.expr)?,
            Expr::GetItem(item) => {
                self.size(&item.subscript_expr)?;
                self.size(&item.expr)?
            }
            Expr::Slice(slice) => {
                [&slice.start, &slice.stop, &slice.step].into_iter().flatten().try_for_each(|bound| self.size(bound).map(drop))?;
                self.size(&slice.expr)?
            }
            Expr::UnaryOp(operation) => self.size(&operation.expr).map(|_| 1)?,
            Expr::BinOp(operation) => {
                let (left, right) = (self.size(&operation.left)?, self.size(&operation.right)?);
                match operation.op {
                    BinOpKind::Add => left + right,
                    BinOpKind::Concat => self.printed(&operation.left)? + self.printed(&operation.right)?,
                    BinOpKind::ScAnd | BinOpKind::ScOr => left.max(right),
                    BinOpKind::Rem | BinOpKind::FloorDiv | BinOpKind::Sub if is_integer(&operation.right) => left,
                    BinOpKind::Eq | BinOpKind::Ne | BinOpKind::Lt | BinOpKind::Lte | BinOpKind::Gt | BinOpKind::Gte | BinOpKind::In => 1,
                    _ => return None,
                }
            }
            Expr::Compare(compared) => {
                self.size(&compared.expr)?;
                compared.ops.iter().try_for_each(|operand| self.size(&operand.expr).map(drop))?;
                1
            }
            Expr::IfExpr(either) => {
                self.size(&either.test_expr)?;
                let otherwise = either.false_expr.as_ref().map_or(Some(1), |expr| self.size(expr))?;
                self.size(&either.true_expr)?.max(otherwise)
            }
            Expr::Test(test) => {
                self.arguments(&test.args)?;
                self.size(&test.expr).map(|_| 1)?
            }
            Expr::Filter(filter) => {
                let (of, arguments) = (self.size(filter.expr.as_ref()?)?, self.arguments(&filter.args)?);
                match filter.name {
                    "trim" => self.printed(filter.expr.as_ref()?)?,
                    "string" => PRINTED * of,
                    "tojson" if filter.args.is_empty() => AS_JSON * of,
                    "length" | "count" => 1,
                    "first" | "last" => of,
                    "default" | "d" => of.max(arguments),
                    _ => return None,
                }
            }
            Expr::Call(call) => {
                let arguments = self.arguments(&call.args)?;
                match &call.expr {
                    Expr::GetAttr(method) if matches!(method.name, "strip" | "lstrip" | "rstrip") => self.size(&method.expr)?,
                    Expr::GetAttr(method) if matches!(method.name, "startswith" | "endswith") => self.size(&method.expr).map(|_| 1)?,
                    Expr::Var(name) if name.id == "raise_exception" => arguments,
                    Expr::Var(name) if name.id == "strftime_now" && is_date(&call.args) => 1,
                    _ => return None,
                }
            }
            Expr::List(list) if list.items.iter().all(|item| matches!(item, Expr::Const(_))) => 1,
            Expr::Tuple(list) if list.items.iter().all(|item| matches!(item, Expr::Const(_))) => 1,
            Expr::List(_) | Expr::Tuple(_) | Expr::Map(_) => return None,
        };
        (size <= SIZE_MAX).then_some(size)
    }

    /// The size of an expression's value as a text.
    fn printed(&self, expr: &Expr<'a>) -> Option<u32> {
        let size = self.size(expr)?;
        let is_text = match expr {
            Expr::Const(_) => true,
            Expr::BinOp(operation) => matches!(operation.op, BinOpKind::Concat),
            Expr::Filter(filter) => matches!(filter.name, "trim" | "string" | "tojson"),
            Expr::Call(_) => true,
            _ => false,
        };
        let size = if is_text { size } else { PRINTED * size };
        // A printed text is not put together again, so it may be longer.
        (size <= PRINTED * SIZE_MAX).then_some(size)
    }

    /// The largest size of these arguments, all of which are given by position.
    fn arguments(&self, arguments: &[CallArg<'a>]) -> Option<u32> {
        arguments.iter().try_fold(0, |most, argument| match argument {
            CallArg::Pos(expr) => Some(self.size(expr)?.max(most)),
            _ => None,
        })
    }
}

fn is_integer(expr: &Expr<'_>) -> bool {
    matches!(expr, Expr::Const(number) if number.value.is_integer())
}

fn is_date(arguments: &[CallArg<'_>]) -> bool {
    matches!(arguments, [CallArg::Pos(Expr::Const(format))] if format.value.as_str().is_some_and(|format| format.len() <= DATE_BYTES_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(source: &str) -> bool {
        is_plain(&TemplateText { source: source.into(), specials: Vec::new() })
    }

    #[test]
    fn templates_that_arrange_messages_are_plain() {
        for source in [
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}",
            "{% for m in messages %}{% set content = '<|' + m['role'] + '|>' + m['content'] | trim + '<|eot|>' %}\
             {% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}",
            "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}\
             {% for m in rest if m.content is string %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
             {{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content.strip() ~ eos_token }}{% else %}{{ 'x' }}{% endfor %}",
            "{{ strftime_now('%d %b %Y') }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}",
        ] {
            assert!(plain(source), "{source}");
        }
    }

    #[test]
    fn what_could_grow_is_not_plain() {
        let doubling = "{% set a = messages ~ '' %}".to_owned() + &"{% set a = a ~ a %}".repeat(40);
        for source in [
            &doubling,
            "{% set a = 'x' %}{% for m in messages %}{% set a = a ~ a %}{% endfor %}",
            "{% set a = 'x' %}{% for m in messages %}{% set b = a + 'x' %}{% set a = b %}{% endfor %}",
            "{% set a = 'x' %}{% for m in messages %}{% if m %}{% set a = a ~ 'y' %}{% endif %}{% endfor %}",
            "{% set a = 'x' %}{% for m in messages %}{% set a = a ~ 'y' %}{% continue %}{% set a = 'x' %}{% endfor %}",
            "{% set ns = namespace(a='x') %}{% for m in messages %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
            "{{ 'x' * 100000 }}",
            "{{ 2 ** 100000 }}",
            "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
            "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
            "{% for i in range(1000000000) %}x{% endfor %}",
            "{{ messages | join(messages | tojson) }}",
            "{{ m.content.replace('', m.content) }}",
            "{{ m.content | replace('', m.content) }}",
            "{{ m.content | indent(1000000) }}",
            "{{ '%1000000000d' % 1 }}",
            "{{ '%1000000000d' | format(1) }}",
            "{{ messages | tojson(indent=16) }}",
            "{{ messages | tojson | tojson }}",
            "{% set a = [] %}{% for m in messages %}{% set a = [a] %}{% endfor %}{{ a | tojson }}",
            "{% set a %}{{ a }}{{ a }}{% endset %}",
            "{{ m.content.ljust(100000) }}",
            "{% include 'chat' %}",
            "{{ self.x() }}",
            "{{ strftime_now(messages[0].content) }}",
        ] {
            assert!(!plain(source), "{source}");
        }
        assert!(!plain(&"x".repeat(BYTES_MAX + 1)));
    }
}
