"""A pretend Terraform provider with the real providers' schemas: what the real `terraform` talks to where no cloud is.

    wire <- schema, rules <- values <- planning, checks <- calls, faults <- provider <- server

It checks what Terraform checks against a schema, and of the providers' own checks those that the rules name. It knows
no cloud: IAM, quotas and the clouds' own refusals are not seen (docs/deploy.md says so too).
"""
